"""The paper as data, run and judged."""
