"""What scripts/train_default_model.py is made of."""
