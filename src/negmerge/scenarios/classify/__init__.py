"""An image classifier forgets records or a class of its training data."""
