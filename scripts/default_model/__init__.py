"""The parts of `train_default_model.py`: corpus, model, optimizer, checkpoint."""
