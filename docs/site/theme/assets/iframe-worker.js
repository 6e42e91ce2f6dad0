// SPDX-License-Identifier: Apache-2.0
// Browsers refuse workers to a page from the file system. The search then runs in a frame, which looks to it as a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.scope = new Promise((resolve) => {
        const frame = document.createElement("iframe");
        frame.hidden = true;
        frame.srcdoc = "<!doctype html>";
        frame.addEventListener("load", () => {
          const scope = frame.contentWindow;
          const load = (address) => new Promise((loaded, failed) => {
            const script = scope.document.createElement("script");
            Object.assign(script, {src: address, onload: loaded, onerror: failed});
            scope.document.head.append(script);
          });
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
          scope.importScripts = (...addresses) => addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve());
          load(url).then(() => resolve(scope));
        }, {once: true});
        document.body.append(frame);
      });
    }
    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", {data})));
    }
    terminate() {}
  };
}
