# ranks: 2
"""The bfloat16 operation of the page computes the rounded mean."""

from support.page_programs import run_blocks

import bagua.torch_api as bagua

run_blocks("docs/how-to/train/write-an-algorithm.md", 3)


bagua.init_process_group()
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], Bfloat16())
torch.manual_seed(5)
batches = torch.randn(2, 4, 8)
model(batches[bagua.get_rank()]).sum().backward()
expected = batches.sum(dim=1).mean(dim=0).expand(4, 8)
torch.testing.assert_close(model.weight.grad, expected, rtol=2**-6, atol=2**-6)
assert not torch.equal(model.weight.grad, expected)
assert torch.equal(model.weight.grad, model.weight.grad.to(torch.bfloat16).float())
optimizer.step()
