"""Attacks: metrics that infer the training samples of a model. ◄ ADD AN ATTACK: one file here."""
