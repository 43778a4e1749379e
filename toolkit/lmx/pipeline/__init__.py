"""The pipeline of a recipe: plan, runner, and one folder per stage kind."""
