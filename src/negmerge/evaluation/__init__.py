"""How much a model forgot and what it kept: the measures of the published protocols."""
