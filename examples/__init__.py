"""Programs and policies that show how the project is used."""
