"""Labelled images: which sets there are, where they lie, decoded once."""
