"""Checkpoints made on the spot, in the formats that people download: a real small model, and random ones."""
