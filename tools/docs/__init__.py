"""What the documentation is made with: tables and Markdown that follow from the code, and how docstrings are read."""
