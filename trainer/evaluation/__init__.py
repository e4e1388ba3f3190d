"""What an evaluation is made of: who is asked, how drafts are verified, and what is made of the counts."""
