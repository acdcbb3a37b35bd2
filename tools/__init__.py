"""Programs for those who work on accelight; ``python -m tools.NAME --help`` says what each does."""
