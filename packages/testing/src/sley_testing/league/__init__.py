"""`train-cli verify --league`: the field's silent errors, a small plan each, in the layout in which others go wrong."""
