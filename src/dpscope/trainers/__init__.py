"""Trainers: one for each way to make a step private. Importing this package does not import torch."""
