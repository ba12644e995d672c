"""From master weights to the policy that computes and is published; routing replay; the hardware it runs
on."""
