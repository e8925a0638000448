"""Pipeline schedules as data: registered, built, validated, simulated, drawn. No torch."""

from shardwright.schedule import named as named  # registers our own schedules before any other
