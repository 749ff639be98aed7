"""What is done to a user's model: weights, wrappers, compilation, running statistics."""
