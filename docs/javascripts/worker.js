// Browsers load no workers from files. Where the site is read without a server, a frame does the search's work.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>postMessage = (data) => frameElement.answer(data)</script><script src="${url}"></script>`;
      this.frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.addEventListener("load", () => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      if (this.ready) this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
