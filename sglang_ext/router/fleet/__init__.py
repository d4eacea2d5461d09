"""The instances: what is known of each, in which state it is, how busy it is."""
