"""What is shown: terminal output, the verdict matrix, pictures, and the HTML report."""
