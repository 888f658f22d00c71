"""A module in memory forgets: with datasets, or with functions that train and measure it."""
