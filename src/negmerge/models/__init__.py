"""Networks: classifiers by name, their weights from files."""
