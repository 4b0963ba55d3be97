"""Speed of experience replay."""
