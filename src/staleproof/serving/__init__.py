"""The miniature serving engine in which the incidents happen."""
