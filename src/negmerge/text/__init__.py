"""Texts: records, sets of records, tokens and feeds; invented persons and short stories.

This package may import `training` and the packages below it; the scenario `text` imports it.
◄ ADD A SET OF TEXTS in `library.py`, or in a plug-in, with `texts.register`.
"""
