"""Losses: each is a weight, known from the batch alone, and a sum."""
