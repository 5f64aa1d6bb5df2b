"""The model that is trained, and how a batch goes through it."""
