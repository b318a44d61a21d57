"""Long-context tasks on the user's model: how far to trust it, at which length, under which policy.

tasks → haystacks (ids and questions) → policy: prefill once, answer each → scores → report
"""
