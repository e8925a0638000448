"""Pipeline schedules as data: built, validated, simulated, drawn. No torch."""
