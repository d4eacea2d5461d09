"""Programs of the project's own: set-up, tests, releases, documentation, following SGLang."""
