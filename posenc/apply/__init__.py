"""What a scheme computes at positions: its bias, transform and embedding, and what it needs."""
