"""What a rank tells, now and then, by which the notebook sees that a training goes wrong.

A rank alone can rarely know: that replicas differ, or that two ranks learn from the same samples,
shows when what all of them tell is compared (`nbdist/client/metrics/checks`). No collective is made
for it, so a check can neither hang a training nor disturb its order.
"""
