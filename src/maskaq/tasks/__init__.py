"""What a model is for: how predictions are evaluated."""
