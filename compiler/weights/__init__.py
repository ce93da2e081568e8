"""The model's own weights: merged into one tensor, watched for changes, read from their file."""
