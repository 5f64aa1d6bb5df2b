"""Train, measure and export small embedding models from a teacher cache."""
