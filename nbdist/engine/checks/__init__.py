"""A rank's regular reports, by which the notebook detects wrong trainings.

A rank alone can rarely know: that replicas differ, or that two ranks learn from the same samples,
shows when the reports of all are compared (`nbdist/client/metrics/checks`). No collective is made
for it, so a check can neither hang a training nor disturb its order.
"""
