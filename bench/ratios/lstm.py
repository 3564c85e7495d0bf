import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.randint(0, 500, (32, 64 * 8 + 1)).to(device)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 128)
        self.lstm = nn.LSTM(128, 192, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(192, 500)

    def forward(self, words, state):
        out, state = self.lstm(self.words(words), state)
        return self.head(out), state


model = Language().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = None
for step in range(8):
    part = text[:, 64 * step : 64 * step + 65]
    if state is not None:
        state = tuple(one.detach() for one in state)
    logits, state = model(part[:, :-1], state)
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), part[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step % 4 == 0:
        print(step, loss.item())
