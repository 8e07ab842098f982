"""Who may do what: keys, their rates and budgets, and the record of administrative acts."""
