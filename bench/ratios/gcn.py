import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
NODES = 12_000
edges = torch.randint(0, NODES, (2, 120_000))
around = (
    torch.sparse_coo_tensor(edges, torch.full((120_000,), 0.1), (NODES, NODES))
    .coalesce()
    .to(device)
)
features, labels = torch.rand(NODES, 256).to(device), torch.randint(0, 7, (NODES,)).to(device)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [256, 128, 128, 128, 7]
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = nn.functional.dropout(
                torch.relu(torch.sparse.mm(around, layer(x))), 0.3, self.training
            )
        return torch.sparse.mm(around, self.layers[-1](x))


model = Graph().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(8):
    optimizer.zero_grad()
    logits = model(features)
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    right = (logits.argmax(1) == labels).float().mean()
    if epoch % 4 == 0:
        print(f"{epoch}: loss {loss.item():.4f}, accuracy {right.item():.4f}")
