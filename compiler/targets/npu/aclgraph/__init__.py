"""The route of captured graphs: npugraph_ex captures a lowered graph at planned sizes and replays it."""
