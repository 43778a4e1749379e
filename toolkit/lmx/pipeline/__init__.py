"""The stages of a recipe: glue only, one stage, one file."""
