"""Programs that several ranks run together: shipped from rank 0, made by each, compared with the model."""
