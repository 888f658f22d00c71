"""The paper's tables and figures, measured beside what was published."""
