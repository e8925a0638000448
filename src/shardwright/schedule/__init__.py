"""Pipeline schedules as data: registered, built, validated, simulated, drawn. No torch."""

from shardwright.schedule import named as named  # our own schedules are registered before any other
