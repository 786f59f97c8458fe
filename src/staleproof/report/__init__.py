"""The verdict matrix, pictures, and the HTML report."""
