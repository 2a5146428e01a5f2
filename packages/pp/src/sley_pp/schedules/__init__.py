"""Schedules: each a pure function `(stages, chunks, micros) -> one list of compute actions per stage`. No torch in here."""
