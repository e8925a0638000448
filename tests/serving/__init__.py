"""Tests of serving: prices, the simulated scheduler, the search, published measurements."""
