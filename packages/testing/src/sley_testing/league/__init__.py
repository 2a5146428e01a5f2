"""Implements `train-cli verify --league`: small plans that would expose known silent errors of training programs."""
