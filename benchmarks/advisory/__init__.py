"""What hints are worth: Symphony's evaluation on real servers."""
