"""The benefit of hints: Symphony's evaluation on real servers."""
