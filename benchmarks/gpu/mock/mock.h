// What the parts of the mock share.
#pragma once
#include <cstdlib>

// The number in an environment variable.
inline unsigned long long mock_setting(const char* name, unsigned long long otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

int mock_current_device();

// Called for each kernel, fill and graph that a program launches.
void mock_count_launch();

// Called wherever the host of a real device waits for it.
void mock_count_wait();

// Milliseconds of a clock that never goes back.
double mock_now_ms();
