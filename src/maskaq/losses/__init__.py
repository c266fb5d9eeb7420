"""Loss maths as pure functions (attention, image, distill), and the terms that recipes weigh (terms)."""
