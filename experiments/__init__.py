"""One folder or file per question; each result carries its origin. Nothing in the packages imports from here."""
