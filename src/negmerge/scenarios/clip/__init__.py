"""A CLIP model forgets one data set and keeps another: models, heads, prompts, linearisation."""
